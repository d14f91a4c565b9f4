"""Example inputs for Hugging Face models, from their config."""
def example_inputs_for(model): raise NotImplementedError
