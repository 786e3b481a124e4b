"""The public calls of a group: collectives, messages, objects, batches and persistent requests."""
