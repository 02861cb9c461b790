"""SGLang's own attention backends, judged: `engine` is what `draftmark judge` finds. Imports no SGLang and no torch.

`setups` and `items` say what is asked. A `station` is a process with a running scheduler, in which `driver` runs scenes
on fresh backends and `truth` compares them. `probes` judge sizes and metadata of backends that cannot run here, and
`releases` fetches other versions.
"""
