"""The decisions of servers, scheduler and workers: state machines without tensors or sockets."""
