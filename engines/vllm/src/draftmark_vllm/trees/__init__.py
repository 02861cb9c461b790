"""Trees of drafts inside an unmodified vLLM, as an opt-in: `--worker-cls draftmark_vllm.trees.worker.TreeWorker`.

To vLLM's scheduler a tree is a list of drafts, parents before children, of which some number is accepted. The worker's
runner gives the rows of a step their depths for positions and the backend their parents, walks the tree where vLLM
would reject drafts, and moves the KV of what is kept into place. It needs runner V1, which takes its draft models and
worker by configuration. Runner V2 makes speculators in a closed list (`init_speculator`) and rejects `custom_class`.

step_trees  which node each row is              tails       mask and depths of a batch
look_up     trees of n-gram drafts              combs       trees of an EAGLE head
choices     the target's token after each row   walk        what of a tree is kept
moves       the kept path's KV                  runner      the steps of vLLM's runner around which these go
"""
