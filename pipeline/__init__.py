"""Packed rows to a better encoder: recipe, encoder, objectives, engine, phases, checkpoints, export."""
