// Products, reductions and scans.
#include "executor.h"

using namespace emulator;
using Tensor = aclTensor*;

ACLNN(aclnnMatmul, (Tensor self, Tensor other, Tensor out, int8_t), {
    return into(out, [a = T(self), b = T(other)] { return at::matmul(a, b); });
})
ACLNN(aclnnMm, (Tensor self, Tensor other, Tensor out, int8_t), {
    return into(out, [a = T(self), b = T(other)] { return at::mm(a, b); });
})
ACLNN(aclnnBatchMatMul, (Tensor self, Tensor other, Tensor out, int8_t), {
    return into(out, [a = T(self), b = T(other)] { return at::bmm(a, b); });
})
ACLNN(aclnnSoftmax, (Tensor self, int64_t dim, Tensor out), {
    return into(out, [a = T(self), dim] { return at::softmax(a, dim); });
})
ACLNN(aclnnReduceSum, (Tensor self, aclIntArray* dims, bool keep, int, Tensor out), {
    return into(out, [a = T(self), d = I(dims), keep, type = T(out).scalar_type()] { return at::sum(a, d, keep, type); });
})
ACLNN(aclnnMean, (Tensor self, aclIntArray* dims, bool keep, int, Tensor out), {
    return into(out, [a = T(self), d = I(dims), keep, type = T(out).scalar_type()] { return at::mean(a, d, keep, type); });
})
ACLNN(aclnnMeanV2, (Tensor self, aclIntArray* dims, bool keep, bool, Tensor out), {
    return into(out, [a = T(self), d = I(dims), keep, type = T(out).scalar_type()] { return at::mean(a, d, keep, type); });
})
ACLNN(aclnnCumsum, (Tensor self, int64_t dim, int, Tensor out), {
    return into(out, [a = T(self), dim, type = T(out).scalar_type()] { return at::cumsum(a, dim, type); });
})
ACLNN(aclnnArgMax, (Tensor self, int64_t dim, bool keep, Tensor out), {
    return into(out, [a = T(self), dim, keep] { return at::argmax(a, dim, keep); });
})
ACLNN(aclnnMax, (Tensor self, Tensor out), { return into(out, [a = T(self)] { return at::max(a); }); })
ACLNN(aclnnMin, (Tensor self, Tensor out), { return into(out, [a = T(self)] { return at::min(a); }); })
ACLNN(aclnnAmax, (Tensor self, aclIntArray* dims, bool keep, Tensor out), {
    return into(out, [a = T(self), d = I(dims), keep] { return at::amax(a, d, keep); });
})
ACLNN(aclnnAll, (Tensor self, aclIntArray* dims, bool keep, Tensor out), {
    return into(out, [a = T(self), d = I(dims), keep] { return d.empty() ? at::all(a) : at::all(a, at::OptionalIntArrayRef(d), keep); });
})
ACLNN(aclnnAny, (Tensor self, aclIntArray* dims, bool keep, Tensor out), {
    return into(out, [a = T(self), d = I(dims), keep] { return d.empty() ? at::any(a) : at::any(a, at::OptionalIntArrayRef(d), keep); });
})
ACLNN(aclnnEqual, (Tensor self, Tensor other, Tensor out), {
    return into(out, [a = T(self), b = T(other)] { return at::scalar_tensor(at::equal(a, b), at::kBool); });
})
ACLNN(aclnnSearchSorted, (Tensor sorted, Tensor self, bool int32, bool right, Tensor sorter, Tensor out), {
    rule(sorter == nullptr, "searchsorted with a sorter is not emulated");
    return into(out, [s = T(sorted), a = T(self), int32, right] { return at::searchsorted(s, a, int32, right); });
})
ACLNN(aclnnSort, (Tensor self, bool, int64_t dim, bool descending, Tensor values, Tensor indices), {
    return [a = T(self), dim, descending, v = T(values), i = T(indices)]() mutable {
        auto [found, at_index] = at::sort(a, true, dim, descending);
        v.copy_(found);
        i.copy_(at_index);
    };
})
ACLNN(aclnnTopk, (Tensor self, int64_t k, int64_t dim, bool largest, bool sorted, Tensor values, Tensor indices), {
    return [=, a = T(self), v = T(values), i = T(indices)]() mutable {
        auto [found, at_index] = at::topk(a, k, dim, largest, sorted);
        v.copy_(found);
        i.copy_(at_index);
    };
})
ACLNN(aclnnMaxDim, (Tensor self, int64_t dim, bool keep, Tensor values, Tensor indices), {
    return [=, a = T(self), v = T(values), i = T(indices)]() mutable {
        auto [found, at_index] = at::max(a, dim, keep);
        v.copy_(found);
        i.copy_(at_index);
    };
})
ACLNN(aclnnMinDim, (Tensor self, int64_t dim, bool keep, Tensor values, Tensor indices), {
    return [=, a = T(self), v = T(values), i = T(indices)]() mutable {
        auto [found, at_index] = at::min(a, dim, keep);
        v.copy_(found);
        i.copy_(at_index);
    };
})
ACLNN(aclnnLogSoftmax, (Tensor self, int64_t dim, Tensor out), {
    return into(out, [a = T(self), dim] { return at::log_softmax(a, dim); });
})
ACLNN(aclnnLogSumExp, (Tensor self, aclIntArray* dims, bool keep, Tensor out), {
    return into(out, [a = T(self), d = I(dims), keep] { return at::logsumexp(a, d, keep); });
})
ACLNN(aclnnAddmm, (Tensor self, Tensor first, Tensor second, aclScalar* beta, aclScalar* alpha, Tensor out, int8_t), {
    return into(out, [c = T(self), a = T(first), b = T(second), f = S(beta), g = S(alpha)] { return at::addmm(c, a, b, f, g); });
})
ACLNN(aclnnInplaceAddmm, (Tensor self, Tensor first, Tensor second, aclScalar* beta, aclScalar* alpha, int8_t), {
    return into(self, [c = T(self), a = T(first), b = T(second), f = S(beta), g = S(alpha)] { return at::addmm(c, a, b, f, g); });
})
