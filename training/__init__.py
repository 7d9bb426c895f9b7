"""Training of models like Infinity: a multi-scale binary tokenizer, then a transformer that predicts its bits stage by stage."""
