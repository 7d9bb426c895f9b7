"""Studies of quality: probes of prompts, Fréchet distances, lists of methods, and formats of weights."""
