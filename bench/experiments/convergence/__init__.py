"""Trainings with dense and with sparse gradients: ``python -m bench.experiments.convergence``."""
