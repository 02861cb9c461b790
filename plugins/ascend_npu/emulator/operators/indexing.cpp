// Operators that move elements: gathers, scatters, concatenation, fills.
#include "executor.h"

using namespace emulator;
using Tensor = aclTensor*;
using Scalar = aclScalar*;

// On a device an index out of range reads or writes other memory. Here it is an error that names the operator.
static at::Tensor in_range(const at::Tensor& index, int64_t size) {
    if (index.numel() > 0) {
        auto low = index.min().item<int64_t>(), high = index.max().item<int64_t>();
        if (low < 0 || high >= size)
            throw std::out_of_range("an index of " + std::to_string(low < 0 ? low : high) + " in a dimension of " + std::to_string(size));
    }
    return index.to(at::kLong);
}

ACLNN(aclnnIndexSelect, (Tensor self, int64_t dim, Tensor index, Tensor out), {
    return into(out, [a = T(self), dim, i = T(index)] { return at::index_select(a, dim, in_range(i, a.size(dim))); });
})
ACLNN(aclnnGather, (Tensor self, int64_t dim, Tensor index, Tensor out), {
    return into(out, [a = T(self), dim, i = T(index)] { return at::gather(a, dim, in_range(i, a.size(dim))); });
})
ACLNN(aclnnEmbedding, (Tensor weight, Tensor index, Tensor out), {
    return into(out, [w = T(weight), i = T(index)] { return at::embedding(w, in_range(i, w.size(0))); });
})
ACLNN(aclnnIndexAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Scalar alpha, Tensor out), {
    return into(out, [a = T(self), dim, i = T(index), s = T(source), f = S(alpha)] {
        return at::index_add(a, dim, in_range(i, a.size(dim)), s.to(a.scalar_type()), f);
    });
})
ACLNN(aclnnIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out), {
    return into(out, [a = T(self), dim, i = T(index), s = T(source)] { return at::index_copy(a, dim, in_range(i, a.size(dim)), s); });
})
ACLNN(aclnnInplaceIndexCopy, (Tensor self, int64_t dim, Tensor index, Tensor source), {
    return [a = T(self), dim, i = T(index), s = T(source)]() mutable { a.index_copy_(dim, in_range(i, a.size(dim)), s); };
})
ACLNN(aclnnScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduce, Tensor out), {
    rule(reduce == 0, "scatter with a reduction is not emulated");
    return into(out, [a = T(self), dim, i = T(index), s = T(source)] { return at::scatter(a, dim, in_range(i, a.size(dim)), s); });
})
ACLNN(aclnnInplaceScatter, (Tensor self, int64_t dim, Tensor index, Tensor source, int64_t reduce), {
    rule(reduce == 0, "scatter with a reduction is not emulated");
    return [a = T(self), dim, i = T(index), s = T(source)]() mutable { a.scatter_(dim, in_range(i, a.size(dim)), s); };
})
ACLNN(aclnnScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduce, Tensor out), {
    rule(reduce == 0, "scatter with a reduction is not emulated");
    return into(out, [a = T(self), dim, i = T(index), v = S(value)] { return at::scatter(a, dim, in_range(i, a.size(dim)), v); });
})
ACLNN(aclnnInplaceScatterValue, (Tensor self, int64_t dim, Tensor index, Scalar value, int64_t reduce), {
    rule(reduce == 0, "scatter with a reduction is not emulated");
    return [a = T(self), dim, i = T(index), v = S(value)]() mutable { a.scatter_(dim, in_range(i, a.size(dim)), v); };
})

ACLNN(aclnnScatterAdd, (Tensor self, int64_t dim, Tensor index, Tensor source, Tensor out), {
    return into(out, [a = T(self), dim, i = T(index), s = T(source)] { return at::scatter_add(a, dim, in_range(i, a.size(dim)), s); });
})
ACLNN(aclnnFlip, (Tensor self, aclIntArray* dims, Tensor out), { return into(out, [a = T(self), d = I(dims)] { return at::flip(a, d); }); })

static c10::List<std::optional<at::Tensor>> indices_of(const std::vector<at::Tensor>& tensors, const at::Tensor& self) {
    c10::List<std::optional<at::Tensor>> list;
    for (size_t d = 0; d < tensors.size(); ++d) {
        auto& one = tensors[d];
        // An empty tensor stands for an axis without an index. As the last entry it is an index of zero elements.
        bool empty = one.defined() && one.dim() == 1 && one.numel() == 0 && self.size(d) != 0;
        bool absent = !one.defined() || (empty && d + 1 < tensors.size());
        if (absent) list.push_back(std::nullopt);
        else list.push_back(one.scalar_type() == at::kBool ? one : one.to(at::kLong));
    }
    return list;
}

static std::vector<at::Tensor> views(const aclTensorList* list) {
    std::vector<at::Tensor> found;
    for (const auto* tensor : list->tensors) found.push_back(T(tensor));
    return found;
}

ACLNN(aclnnIndex, (Tensor self, aclTensorList* indices, Tensor out), {
    return into(out, [a = T(self), i = views(indices)] { return at::index(a, indices_of(i, a)); });
})
ACLNN(aclnnIndexPutImpl, (Tensor self, aclTensorList* indices, Tensor values, bool accumulate, bool), {
    return [a = T(self), i = views(indices), v = T(values), accumulate]() mutable { a.index_put_(indices_of(i, a), v, accumulate); };
})

ACLNN(aclnnCat, (aclTensorList* tensors, int64_t dim, Tensor out), {
    return into(out, [t = views(tensors), dim] { return at::cat(t, dim); });
})
ACLNN(aclnnStack, (aclTensorList* tensors, int64_t dim, Tensor out), {
    return into(out, [t = views(tensors), dim] { return at::stack(t, dim); });
})
ACLNN(aclnnConstantPadNd, (Tensor self, aclIntArray* pad, Scalar value, Tensor out), {
    return into(out, [a = T(self), p = I(pad), v = S(value)] { return at::constant_pad_nd(a, p, v); });
})
ACLNN(aclnnRepeat, (Tensor self, aclIntArray* repeats, Tensor out), {
    return into(out, [a = T(self), r = I(repeats)] { return a.repeat(r); });
})
ACLNN(aclnnRepeatInterleave, (Tensor self, Tensor repeats, int64_t output_size, Tensor out), {
    return into(out, [a = T(self), r = T(repeats), output_size] { return at::repeat_interleave(a.flatten(), r.to(at::kLong), std::nullopt, output_size); });
})
ACLNN(aclnnRepeatInterleaveWithDim, (Tensor self, Tensor repeats, int64_t dim, int64_t output_size, Tensor out), {
    return into(out, [a = T(self), r = T(repeats), dim, output_size] { return at::repeat_interleave(a, r.to(at::kLong), dim, output_size); });
})
ACLNN(aclnnRepeatInterleaveInt, (Tensor self, int64_t repeats, int64_t, Tensor out), {
    return into(out, [a = T(self), repeats] { return at::repeat_interleave(a.flatten(), repeats); });
})
ACLNN(aclnnRepeatInterleaveIntWithDim, (Tensor self, int64_t repeats, int64_t dim, int64_t, Tensor out), {
    return into(out, [a = T(self), repeats, dim] { return at::repeat_interleave(a, repeats, dim); });
})
ACLNN(aclnnTriu, (Tensor self, int64_t diagonal, Tensor out), { return into(out, [a = T(self), diagonal] { return at::triu(a, diagonal); }); })
ACLNN(aclnnTril, (Tensor self, int64_t diagonal, Tensor out), { return into(out, [a = T(self), diagonal] { return at::tril(a, diagonal); }); })

// CANN 9.1 has no fill kernel for float8 on an A2 or A3.
static void no_float8(const aclTensor* self) {
    rule(!isFloat8Type(self->dtype), "float8 cannot be filled on this product; fill its bytes as uint8");
}

ACLNN(aclnnInplaceFillScalar, (Tensor self, Scalar value), {
    no_float8(self);
    return [a = T(self), v = S(value)]() mutable { a.fill_(v); };
})
ACLNN(aclnnInplaceFillTensor, (Tensor self, Tensor value), {
    no_float8(self);
    return [a = T(self), v = T(value)]() mutable { a.fill_(v); };
})
ACLNN(aclnnInplaceZero, (Tensor self), { return [a = T(self)]() mutable { a.zero_(); }; })
ACLNN(aclnnInplaceOne, (Tensor self), { no_float8(self); return [a = T(self)]() mutable { a.fill_(1); }; })
ACLNN(aclnnArange, (Scalar start, Scalar end, Scalar step, Tensor out), {
    return into(out, [from = S(start), to = S(end), by = S(step), options = T(out).options()] { return at::arange(from, to, by, options); });
})
// The number of results is known after the operator has run: torch_npu waits, then calls aclGetViewShape.
ACLNN(aclnnNonzero, (Tensor self, Tensor out), {
    return [a = T(self), o = T(out), out]() mutable {
        auto found = at::nonzero(a);
        o.slice(0, 0, found.size(0)).copy_(found);
        out->sizes[0] = found.size(0);
    };
})
// The transposed form, of indexing by a bool mask: the output begins with all coordinates of the first dimension.
ACLNN(aclnnNonzeroV2, (Tensor self, Tensor out), {
    return [a = T(self), o = T(out), out]() mutable {
        auto found = at::nonzero(a).t();
        o.flatten().slice(0, 0, found.numel()).copy_(found.flatten());
        out->sizes[1] = found.size(1);
    };
})
