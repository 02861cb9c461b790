// Arguments of operators, and torch's view of them. Their layouts are the emulator's, as the C interface is opaque.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../runtime/abi.h"

struct aclTensor {
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    void* storage;
    at::Tensor view;  // of the host memory that stands for device memory
    void* start() const;
    size_t span() const;  // bytes from start() to the last element
};

struct aclScalar {
    at::Scalar value;
};

struct aclIntArray {
    std::vector<int64_t> values;
};

struct aclBoolArray {
    std::vector<bool> values;
};

struct aclTensorList {
    std::vector<const aclTensor*> tensors;
};

struct aclScalarList {
    std::vector<const aclScalar*> scalars;
};

namespace emulator {

at::ScalarType dtype_of(int code);  // aclDataType

inline at::Tensor T(const aclTensor* tensor) { return tensor == nullptr ? at::Tensor() : tensor->view; }
inline at::Scalar S(const aclScalar* scalar) { return scalar->value; }
inline std::vector<int64_t> I(const aclIntArray* array) { return array == nullptr ? std::vector<int64_t>{} : array->values; }

}  // namespace emulator
