"""State machines of the message protocol: frames, queues, inboxes, schemas. No input or output."""
