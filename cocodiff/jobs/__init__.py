"""What any command needs that runs a model on ranks: ranks as processes, the partition of them, models loaded, options,
a folder of results, the store of units of work that are finished, and the queue that replicas take them from. What is
made of all that is `cocodiff_eval.harness`.
"""
