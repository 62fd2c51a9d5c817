"""How each kind of task is answered: from a loaded model to metrics, a module for each kind."""
