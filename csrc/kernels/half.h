/* half.h - the four functions of one 16-bit float format. A template: body.h includes it once per
 * format, without an include guard. Its parameters, for LANES elements each, are undefined again at
 * the end:
 *   HALF(name)      the name of a function of this format
 *   LOAD_F32        floats as a vector
 *   LOAD, STORE     elements of 16 bits as a vector, and back
 *   DECODE          (dst, src)
 *
 * Elements after the last whole vector are copied into one vector and back.
 */

static void HALF(encode)(uint16_t *dst, const float *src, float factor, size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    const vec by = vec_set(factor);
    for (size_t i = 0; i < whole; i += LANES) {
        fetch_ahead(src + i);
        STORE(dst + i, vec_mul(LOAD_F32(src + i), by));
    }
    if (rest) {
        float in[LANES] = {0};
        uint16_t out[LANES];
        memcpy(in, src + whole, rest * sizeof *in);
        STORE(out, vec_mul(LOAD_F32(in), by));
        memcpy(dst + whole, out, rest * sizeof *out);
    }
}

static void HALF(decode)(float *dst, const uint16_t *src, size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    for (size_t i = 0; i < whole; i += LANES)
        DECODE(dst + i, src + i);
    if (rest) {
        uint16_t in[LANES] = {0};
        float out[LANES];
        memcpy(in, src + whole, rest * sizeof *in);
        DECODE(out, in);
        memcpy(dst + whole, out, rest * sizeof *out);
    }
}

/* Returns the value of x as others get it, encoded and decoded. */
static inline vec HALF(contribution)(vec x, vec pre)
{
    uint16_t wire[LANES];
    STORE(wire, vec_mul(x, pre));
    return LOAD(wire);
}

static inline vec HALF(fused)(vec acc, vec x, vec post)
{
    return vec_mul(vec_add(acc, x), post);
}

static void HALF(add)(uint16_t *dst, const uint16_t *acc, const float *x, float pre, float post,
                      size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    const vec before = vec_set(pre);
    const vec after = vec_set(post);
    for (size_t i = 0; i < whole; i += LANES)
        STORE(dst + i,
              HALF(fused)(LOAD(acc + i), HALF(contribution)(LOAD_F32(x + i), before), after));
    if (rest) {
        uint16_t sum[LANES] = {0};
        float in[LANES] = {0};
        memcpy(sum, acc + whole, rest * sizeof *sum);
        memcpy(in, x + whole, rest * sizeof *in);
        STORE(sum, HALF(fused)(LOAD(sum), HALF(contribution)(LOAD_F32(in), before), after));
        memcpy(dst + whole, sum, rest * sizeof *sum);
    }
}

static void HALF(add_half)(uint16_t *dst, const uint16_t *acc, const uint16_t *x, float post,
                           size_t n)
{
    const size_t whole = n - n % LANES;
    const size_t rest = n - whole;
    const vec after = vec_set(post);
    for (size_t i = 0; i < whole; i += LANES)
        STORE(dst + i, HALF(fused)(LOAD(acc + i), LOAD(x + i), after));
    if (rest) {
        uint16_t sum[LANES] = {0};
        uint16_t in[LANES] = {0};
        memcpy(sum, acc + whole, rest * sizeof *sum);
        memcpy(in, x + whole, rest * sizeof *in);
        STORE(sum, HALF(fused)(LOAD(sum), LOAD(in), after));
        memcpy(dst + whole, sum, rest * sizeof *sum);
    }
}

#undef HALF
#undef LOAD_F32
#undef LOAD
#undef STORE
#undef DECODE
