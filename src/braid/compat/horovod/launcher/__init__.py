"""The command horovodrun and the function horovod.run."""
