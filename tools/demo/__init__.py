"""Parts of the demo model's training: data, questions, network, export, evaluation (see ../train_demo.py)."""
