"""What users call on a group: collectives, messages, objects, batches and persistent requests."""
