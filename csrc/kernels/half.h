/* half.h - the four functions of one 16-bit float format. A template: body.h includes it once per
 * format, with HALF(name) making the name of a function, and LOAD and STORE converting LANES
 * elements from and to 16 bits. No include guard, by design; it undefines its parameters.
 *
 * What is left of n after the last whole vector goes through one vector of copies.
 */

static void HALF(encode)(uint16_t *dst, const float *src, float factor, size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    const vec by = vec_set(factor);
    EACH (size_t i = 0; i < whole; i += LANES)
        STORE(dst + i, vec_mul(vec_load(src + i), by));
    if (rest) {
        float in[LANES] = {0};
        uint16_t out[LANES];
        memcpy(in, src + whole, rest * sizeof *in);
        STORE(out, vec_mul(vec_load(in), by));
        memcpy(dst + whole, out, rest * sizeof *out);
    }
}

static void HALF(decode)(float *dst, const uint16_t *src, size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    EACH (size_t i = 0; i < whole; i += LANES)
        vec_store(dst + i, LOAD(src + i));
    if (rest) {
        uint16_t in[LANES] = {0};
        float out[LANES];
        memcpy(in, src + whole, rest * sizeof *in);
        vec_store(out, LOAD(in));
        memcpy(dst + whole, out, rest * sizeof *out);
    }
}

static inline vec HALF(fused)(vec acc, vec x, vec pre, vec post)
{
    return vec_mul(vec_add(acc, vec_mul(x, pre)), post);
}

static void HALF(add)(uint16_t *dst, const uint16_t *acc, const float *x, float pre, float post,
                      size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    const vec before = vec_set(pre);
    const vec after = vec_set(post);
    EACH (size_t i = 0; i < whole; i += LANES)
        STORE(dst + i, HALF(fused)(LOAD(acc + i), vec_load(x + i), before, after));
    if (rest) {
        uint16_t sum[LANES] = {0};
        float in[LANES] = {0};
        memcpy(sum, acc + whole, rest * sizeof *sum);
        memcpy(in, x + whole, rest * sizeof *in);
        STORE(sum, HALF(fused)(LOAD(sum), vec_load(in), before, after));
        memcpy(dst + whole, sum, rest * sizeof *sum);
    }
}

static void HALF(add_half)(uint16_t *dst, const uint16_t *acc, const uint16_t *x, float pre,
                           float post, size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    const vec before = vec_set(pre);
    const vec after = vec_set(post);
    EACH (size_t i = 0; i < whole; i += LANES)
        STORE(dst + i, HALF(fused)(LOAD(acc + i), LOAD(x + i), before, after));
    if (rest) {
        uint16_t sum[LANES] = {0};
        uint16_t in[LANES] = {0};
        memcpy(sum, acc + whole, rest * sizeof *sum);
        memcpy(in, x + whole, rest * sizeof *in);
        STORE(sum, HALF(fused)(LOAD(sum), LOAD(in), before, after));
        memcpy(dst + whole, sum, rest * sizeof *sum);
    }
}

#undef HALF
#undef LOAD
#undef STORE
