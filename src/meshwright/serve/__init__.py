"""Inference: loads a model under a plan, and generates text or predictions for requests that come and go."""
