"""Training of Infinity's kind of model: a multi-scale binary tokenizer, then a transformer that predicts its bits stage by stage."""
