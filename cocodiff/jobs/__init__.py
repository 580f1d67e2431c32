"""What any command needs that runs a model on ranks: ranks as processes, the partition of them, models loaded, options,
a folder of results with its journal, and the queue that replicas take batches from. What is made of all that is
`cocodiff_eval.harness`.
"""
