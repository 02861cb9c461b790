#!/bin/sh
# The compiler of an n-gram corpus that leaves an include out (SGLang 0.5.17 and 0.5.18).
exec c++ -include cstddef "$@"
