#include "tensor.h"

#include <cstring>

#include "../runtime/log.h"
#include "../runtime/memory.h"
#include "executor.h"

using namespace emulator;

namespace emulator {

// Codes of aclDataType, from the public page of that enumeration.
at::ScalarType dtype_of(int code) {
    switch (code) {
        case 0: return at::kFloat;
        case 1: return at::kHalf;
        case 2: return at::kChar;
        case 3: return at::kInt;
        case 4: return at::kByte;
        case 6: return at::kShort;
        case 7: return at::kUInt16;
        case 9: return at::kLong;
        case 11: return at::kDouble;
        case 12: return at::kBool;
        case 27: return at::kBFloat16;
        case 36: return at::kFloat8_e4m3fn;
        default: throw std::invalid_argument("data type " + std::to_string(code) + " is not emulated");
    }
}

// item() is avoided, because a dispatch mode of the caller's thread would see the call.
static at::Scalar scalar_of(const void* value, at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat: return *static_cast<const float*>(value);
        case at::kDouble: return *static_cast<const double*>(value);
        case at::kHalf: return static_cast<float>(*static_cast<const at::Half*>(value));
        case at::kBFloat16: return static_cast<float>(*static_cast<const at::BFloat16*>(value));
        case at::kBool: return *static_cast<const bool*>(value);
        case at::kLong: return *static_cast<const int64_t*>(value);
        case at::kInt: return *static_cast<const int32_t*>(value);
        case at::kShort: return *static_cast<const int16_t*>(value);
        case at::kChar: return *static_cast<const int8_t*>(value);
        case at::kByte: return *static_cast<const uint8_t*>(value);
        default: die("a scalar of a data type that is not emulated");
    }
}

}  // namespace emulator

void* aclTensor::start() const { return static_cast<char*>(storage) + offset * static_cast<int64_t>(c10::elementSize(dtype)); }

size_t aclTensor::span() const {
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
        if (sizes[i] == 0) return 0;
        last += (sizes[i] - 1) * strides[i];
    }
    return (last + 1) * c10::elementSize(dtype);
}

API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, int dtype, const int64_t* strides, int64_t offset, int,
                               const int64_t*, uint64_t, void* storage) {
    try {
        auto* tensor = new aclTensor{dtype_of(dtype), {sizes, sizes + dims}, {strides, strides + dims}, offset, storage, {}};
        touched(*tensor);
        auto options = at::TensorOptions().dtype(tensor->dtype);
        tensor->view = at::from_blob(tensor->start(), tensor->sizes, tensor->strides, options);
        return tensor;
    } catch (const std::exception& error) {
        fail(OPERATOR_REJECTED, error.what());
        return nullptr;
    }
}

API aclScalar* aclCreateScalar(void* value, int dtype) { return new aclScalar{scalar_of(value, dtype_of(dtype))}; }
API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) { return new aclIntArray{{values, values + size}}; }
API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) { return new aclBoolArray{std::vector<bool>(values, values + size)}; }
API aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t size) { return new aclTensorList{{values, values + size}}; }
API aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t size) { return new aclScalarList{{values, values + size}}; }

API int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
    *dims = tensor->sizes.size();
    *sizes = new int64_t[*dims];  // the caller deletes it
    std::copy(tensor->sizes.begin(), tensor->sizes.end(), *sizes);
    return OK;
}

API int aclDestroyTensor(const aclTensor* tensor) { return delete tensor, OK; }
API int aclDestroyScalar(const aclScalar* scalar) { return delete scalar, OK; }
API int aclDestroyIntArray(const aclIntArray* array) { return delete array, OK; }
API int aclDestroyBoolArray(const aclBoolArray* array) { return delete array, OK; }
API int aclDestroyScalarList(const aclScalarList* list) { return delete list, OK; }

API int aclDestroyTensorList(const aclTensorList* list) {
    for (const auto* tensor : list->tensors) delete tensor;
    return delete list, OK;
}
