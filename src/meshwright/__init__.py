"""meshwright: plan, tune and train large language models across GPUs."""

__version__ = "0.1.0"
