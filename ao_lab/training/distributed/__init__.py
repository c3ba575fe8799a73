"""Training in low precision over several ranks: FSDP2 that gathers codes, and tensor parallelism.

What equals one process bit for bit, and what does not:

* FSDP2, HSDP and DDP: operands, outputs and losses of each rank are those of one process that is given the rank's batch;
  gradients those of one process that runs the ranks' batches one after another and averages, as two ranks add in either order
  alike. With more ranks the order of the sum is the library's. One process that runs them as one batch has other bits: one
  scale for the tensor, and scales of g.T and x.T along tokens, then span all batches.
* Codes gathered instead of values: the same bits for the same recipe. What differs is the recipe (`fsdp_gather.gather_recipe`):
  with a scale for each row w.T is made of w's codes.
* Optimizers, recomputation, accumulation, compiled blocks: as without.
* Tensor parallelism: all six operands are parts of those of one process. Outputs split along N have sums over the same K, in an
  order that the library chooses by shape; sums that ranks add (outputs over K, the input's gradient over N) are rounded before,
  so they are equal where these sums are exact. Stochastic rounding draws by each rank's own generator.
"""
