"""Directory that `fork_server` puts at the front of PYTHONPATH; see `sitecustomize`."""
