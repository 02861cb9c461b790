"""Judge for SGLang's own attention backends, used by `draftmark judge`. Importing it imports neither SGLang nor torch.

* `engine` is the entry point. `setups` and `items` define servers, forwards and questions.
* `scheduler_process` starts a process with a running scheduler. There `driver` runs scenes (forwards with chosen
  lengths and trees) on new backends, and `truth` compares their output with float64 attention.
* `probes` checks sizes and metadata of backends that cannot run on a CPU. `releases` downloads other SGLang versions.
"""
