"""Parameters plus forward: the parts that models are built from. Each layer cuts its own parameters over the ranks."""
