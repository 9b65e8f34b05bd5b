"""Targets: each turns a Region into something that runs. A target reads Regions, never FX graphs."""
