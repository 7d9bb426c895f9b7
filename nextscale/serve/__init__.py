"""The image server: the endpoint that clients speak already, over the batcher."""
