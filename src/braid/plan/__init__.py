"""Plans: which way of splitting a model is fastest on given machines."""
