"""Handing the state to a newcomer while the training goes on."""
