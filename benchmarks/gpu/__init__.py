"""`python -m benchmarks gpu`: the first minutes on a GPU, as stages that each leave a file and a verdict."""
