"""Training steps of linear layers that repeat, with every choice behind them."""
