"""Other projects as arms of the experiment: their own code, on the same model, sequences and scheme, judged by our windows."""
