#!/bin/sh
# C++ compiler for SGLang 0.5.17 and 0.5.18: their n-gram corpus lacks an include of <cstddef>.
exec c++ -include cstddef "$@"
