"""Draft trees inside an unmodified vLLM. Opt in with `--worker-cls draftmark_vllm.trees.worker.TreeWorker`.

vLLM's scheduler sees a tree as a list of drafts, parents before children, and accepts a number of them. Three steps of
vLLM's runner change:

* A row gets the depth of its node as its position, and the backend gets the parents.
* Acceptance follows the tree's branches, where vLLM would reject drafts.
* KV of the accepted nodes moves to the slots that a chain of drafts would have used.

Trees need runner V1, which takes draft models and workers by configuration. Runner V2 creates speculators from a closed
list (`init_speculator`) and rejects `custom_class`.

step_trees  tree node of each row               tails       mask and depths of a batch
look_up     trees of n-gram drafts              combs       trees of an EAGLE head
choices     the target's token after each row   acceptance  accepted nodes of a tree, and their KV
runner      the changed steps of vLLM's runner
"""
