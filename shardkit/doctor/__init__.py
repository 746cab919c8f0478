"""`shardkit doctor recipe.yaml`: what accumulation and ranks do to the BatchNorm layers of a recipe, and what to do.

One logical batch of the recipe's train data goes through copies of its model, in one process that never trains, and
answers the two questions of every BatchNorm user:

1. Statistics delta. What do the running statistics of each layer become after ONE large batch, and after ONE
   accumulation cycle under the recipe's policy, cut into micro-batches and ranks as the recipe cuts it? See `delta`.
2. Memory flatness. How much does one window take at accumulation 1, 2, 4, 8? See `flatness`.

`--json FILE` writes one object:

    recipe, policy, world_size, accumulation, micro_batch_size, global_batch_size, items
        what was asked, and the items of the logical batch that was read (fewer where the data set is small)
    thresholds      {mean: [ok, badly], variance: [ok, badly], flat}
    layers          worst first: name, mode, channels, momentum, values (a channel, in one forward), updates (of the
                    running statistics in a cycle), mean_delta, variance_delta, settled_mean_delta,
                    settled_variance_delta, worst_mean_delta, worst_variance_delta, output_delta, severity, verdict
                    (ok, drifts or badly)
    failure         why the cycle could not be run, as when a micro-batch has one value a channel; null when it was
    memory          policy, peak_bytes {accumulation: bytes}, verdict (flat, grows, or fails), failure (why the policy
                    does not run at an accumulation that is missing)
    verdict         plain words
    recommended     policy, block (YAML to paste), why (two sentences), remaining (the largest severity that was
                    measured under it; null when it was not measured)

A severity is the largest delta as a multiple of what is still ok. A number that is not finite is null.
"""
