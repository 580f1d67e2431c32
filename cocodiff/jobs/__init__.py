"""The parts shared by all commands that run on ranks.

They are ranks as processes, the folder of results with its store of finished units of work, checks of models' files,
options, and output on the terminal. `cocodiff_eval.harness` builds the inpainting jobs from them, and `arrays` runs
one on an array.
"""
