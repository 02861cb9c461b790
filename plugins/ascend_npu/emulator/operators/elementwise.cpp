// Element-wise operators.
#include "executor.h"

using namespace emulator;
using Tensor = aclTensor*;
using Scalar = aclScalar*;

#define UNARY(NAME, FUNCTION) \
    ACLNN(aclnn##NAME, (Tensor self, Tensor out), { return into(out, [a = T(self)] { return FUNCTION(a); }); })
#define UNARY_INPLACE(NAME, FUNCTION) \
    ACLNN(aclnnInplace##NAME, (Tensor self), { return into(self, [a = T(self)] { return FUNCTION(a); }); })
#define BINARY(NAME, FUNCTION)                                                  \
    ACLNN(aclnn##NAME, (Tensor self, Tensor other, Tensor out), {               \
        return into(out, [a = T(self), b = T(other)] { return FUNCTION(a, b); }); \
    })
#define BINARY_INPLACE(NAME, FUNCTION)                                           \
    ACLNN(aclnnInplace##NAME, (Tensor self, Tensor other), {                     \
        return into(self, [a = T(self), b = T(other)] { return FUNCTION(a, b); }); \
    })
#define SCALAR(NAME, FUNCTION)                                                  \
    ACLNN(aclnn##NAME, (Tensor self, Scalar other, Tensor out), {               \
        return into(out, [a = T(self), b = S(other)] { return FUNCTION(a, b); }); \
    })
#define SCALAR_INPLACE(NAME, FUNCTION)                                           \
    ACLNN(aclnnInplace##NAME, (Tensor self, Scalar other), {                     \
        return into(self, [a = T(self), b = S(other)] { return FUNCTION(a, b); }); \
    })
#define BOTH_BINARY(NAME, FUNCTION) BINARY(NAME, FUNCTION) BINARY_INPLACE(NAME, FUNCTION)
#define BOTH_SCALAR(NAME, FUNCTION) SCALAR(NAME, FUNCTION) SCALAR_INPLACE(NAME, FUNCTION)

UNARY(Abs, at::abs)
UNARY(Neg, at::neg)
UNARY(Exp, at::exp)
UNARY(Log, at::log)
UNARY(Cos, at::cos)
UNARY(Sin, at::sin)
UNARY(Rsqrt, at::rsqrt)
UNARY(Sqrt, at::sqrt)
UNARY(Reciprocal, at::reciprocal)
UNARY(Sigmoid, at::sigmoid)
UNARY(Silu, at::silu)
UNARY(Tanh, at::tanh)
UNARY(Floor, at::floor)
UNARY(Ceil, at::ceil)
UNARY(Round, at::round)
UNARY(Sign, at::sign)
UNARY(Gelu, at::gelu)
UNARY(LogicalNot, at::logical_not)
UNARY(BitwiseNot, at::bitwise_not)
UNARY(IsFinite, at::isfinite)
UNARY_INPLACE(Sigmoid, at::sigmoid)
UNARY_INPLACE(Exp, at::exp)
UNARY_INPLACE(Neg, at::neg)

BOTH_BINARY(Mul, at::mul)
BOTH_BINARY(Div, at::div)
BOTH_SCALAR(Muls, at::mul)
BOTH_SCALAR(Divs, at::div)
BINARY(Minimum, at::minimum)
BINARY(Maximum, at::maximum)
BOTH_BINARY(FloorDivide, at::floor_divide)
BOTH_SCALAR(FloorDivides, at::floor_divide)
BOTH_BINARY(RemainderTensorTensor, at::remainder)
BOTH_SCALAR(RemainderTensorScalar, at::remainder)
BOTH_BINARY(PowTensorTensor, at::pow)
BOTH_SCALAR(PowTensorScalar, at::pow)

BOTH_BINARY(EqTensor, at::eq)
BOTH_BINARY(NeTensor, at::ne)
BOTH_BINARY(LtTensor, at::lt)
BOTH_BINARY(LeTensor, at::le)
BOTH_BINARY(GtTensor, at::gt)
BOTH_BINARY(GeTensor, at::ge)
BOTH_SCALAR(EqScalar, at::eq)
BOTH_SCALAR(NeScalar, at::ne)
BOTH_SCALAR(LtScalar, at::lt)
BOTH_SCALAR(LeScalar, at::le)
BOTH_SCALAR(GtScalar, at::gt)
BOTH_SCALAR(GeScalar, at::ge)

BOTH_BINARY(LogicalAnd, at::logical_and)
BOTH_BINARY(LogicalOr, at::logical_or)
BOTH_BINARY(BitwiseAndTensor, at::bitwise_and)
BOTH_BINARY(BitwiseOrTensor, at::bitwise_or)
BOTH_BINARY(BitwiseXorTensor, at::bitwise_xor)
BOTH_SCALAR(BitwiseAndScalar, at::bitwise_and)
BOTH_SCALAR(BitwiseOrScalar, at::bitwise_or)
BOTH_SCALAR(BitwiseXorScalar, at::bitwise_xor)
BINARY(LeftShift, at::bitwise_left_shift)
BINARY(RightShift, at::bitwise_right_shift)

ACLNN(aclnnAdd, (Tensor self, Tensor other, Scalar alpha, Tensor out), {
    return into(out, [a = T(self), b = T(other), f = S(alpha)] { return at::add(a, b, f); });
})
ACLNN(aclnnAdds, (Tensor self, Scalar other, Scalar alpha, Tensor out), {
    return into(out, [a = T(self), b = S(other), f = S(alpha)] { return at::add(a, b, f); });
})
ACLNN(aclnnInplaceAdd, (Tensor self, Tensor other, Scalar alpha), {
    return into(self, [a = T(self), b = T(other), f = S(alpha)] { return at::add(a, b, f); });
})
ACLNN(aclnnInplaceAdds, (Tensor self, Scalar other, Scalar alpha), {
    return into(self, [a = T(self), b = S(other), f = S(alpha)] { return at::add(a, b, f); });
})
ACLNN(aclnnSub, (Tensor self, Tensor other, Scalar alpha, Tensor out), {
    return into(out, [a = T(self), b = T(other), f = S(alpha)] { return at::sub(a, b, f); });
})
ACLNN(aclnnSubs, (Tensor self, Scalar other, Scalar alpha, Tensor out), {
    return into(out, [a = T(self), b = S(other), f = S(alpha)] { return at::sub(a, b, f); });
})
ACLNN(aclnnInplaceSub, (Tensor self, Tensor other, Scalar alpha), {
    return into(self, [a = T(self), b = T(other), f = S(alpha)] { return at::sub(a, b, f); });
})
ACLNN(aclnnInplaceSubs, (Tensor self, Scalar other, Scalar alpha), {
    return into(self, [a = T(self), b = S(other), f = S(alpha)] { return at::sub(a, b, f); });
})
ACLNN(aclnnRsubs, (Tensor self, Scalar other, Scalar alpha, Tensor out), {
    return into(out, [a = T(self), b = S(other), f = S(alpha)] { return at::rsub(a, b, f); });
})

static std::string rounding(int mode) { return mode == 1 ? "trunc" : "floor"; }

ACLNN(aclnnDivMod, (Tensor self, Tensor other, int mode, Tensor out), {
    return into(out, [a = T(self), b = T(other), m = rounding(mode)] { return at::div(a, b, m); });
})
ACLNN(aclnnDivMods, (Tensor self, Scalar other, int mode, Tensor out), {
    return into(out, [a = T(self), b = S(other), m = rounding(mode)] { return at::div(a, b, m); });
})

ACLNN(aclnnInplaceDivMod, (Tensor self, Tensor other, int mode), {
    return into(self, [a = T(self), b = T(other), m = rounding(mode)] { return at::div(a, b, m); });
})
ACLNN(aclnnInplaceDivMods, (Tensor self, Scalar other, int mode), {
    return into(self, [a = T(self), b = S(other), m = rounding(mode)] { return at::div(a, b, m); });
})
ACLNN(aclnnIsClose, (Tensor self, Tensor other, double rtol, double atol, bool equal_nan, Tensor out), {
    return into(out, [=, a = T(self), b = T(other)] { return at::isclose(a, b, rtol, atol, equal_nan); });
})

static std::optional<at::Scalar> maybe(Scalar scalar) { return scalar == nullptr ? std::nullopt : std::optional(S(scalar)); }

ACLNN(aclnnClamp, (Tensor self, Scalar low, Scalar high, Tensor out), {
    return into(out, [a = T(self), l = maybe(low), h = maybe(high)] { return at::clamp(a, l, h); });
})
ACLNN(aclnnClampMin, (Tensor self, Scalar low, Tensor out), {
    return into(out, [a = T(self), l = S(low)] { return at::clamp_min(a, l); });
})
ACLNN(aclnnClampMax, (Tensor self, Scalar high, Tensor out), {
    return into(out, [a = T(self), h = S(high)] { return at::clamp_max(a, h); });
})
ACLNN(aclnnInplaceClampMax, (Tensor self, Scalar high), {
    return into(self, [a = T(self), h = S(high)] { return at::clamp_max(a, h); });
})
ACLNN(aclnnLerp, (Tensor self, Tensor end, Tensor weight, Tensor out), {
    return into(out, [a = T(self), b = T(end), w = T(weight)] { return at::lerp(a, b, w); });
})
ACLNN(aclnnLerps, (Tensor self, Tensor end, Scalar weight, Tensor out), {
    return into(out, [a = T(self), b = T(end), w = S(weight)] { return at::lerp(a, b, w); });
})
ACLNN(aclnnAddcmul, (Tensor self, Tensor first, Tensor second, Scalar value, Tensor out), {
    return into(out, [a = T(self), b = T(first), c = T(second), v = S(value)] { return at::addcmul(a, b, c, v); });
})
ACLNN(aclnnInplaceAddcmul, (Tensor self, Tensor first, Tensor second, Scalar value), {
    return into(self, [a = T(self), b = T(first), c = T(second), v = S(value)] { return at::addcmul(a, b, c, v); });
})
ACLNN(aclnnNanToNum, (Tensor self, float nan, float high, float low, Tensor out), {
    return into(out, [=, a = T(self)] { return at::nan_to_num(a, nan, high, low); });
})
ACLNN(aclnnInplaceNanToNum, (Tensor self, float nan, float high, float low), {
    return into(self, [=, a = T(self)] { return at::nan_to_num(a, nan, high, low); });
})
ACLNN(aclnnSWhere, (Tensor condition, Tensor self, Tensor other, Tensor out), {
    return into(out, [c = T(condition), a = T(self), b = T(other)] { return at::where(c, a, b); });
})
ACLNN(aclnnInplaceMaskedFillScalar, (Tensor self, Tensor mask, Scalar value), {
    return into(self, [a = T(self), m = T(mask), v = S(value)] { return at::masked_fill(a, m, v); });
})
ACLNN(aclnnCast, (Tensor self, int, Tensor out), { return into(out, [a = T(self)] { return a; }); })
ACLNN(aclnnInplaceCopy, (Tensor self, Tensor source), { return into(self, [a = T(source)] { return a; }); })
