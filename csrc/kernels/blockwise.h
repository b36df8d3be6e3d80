/* blockwise.h - the three functions of one format, from those of a whole block. A template:
 * included once per format, without an include guard. Its parameters are undefined again at the
 * end:
 *   FORMAT(name)    the name of a function of this format
 *   BLOCK, BYTES    elements of a block, and bytes of its codes
 * and there must be these functions of a whole block:
 *   encode_block    returns the scale, to be stored; elements from n on are zeros, not the tensor's
 *   decode_block    returns 1 if the scale s is not finite
 *   add_block       likewise
 *
 * A short block is copied into a whole one and back.
 */

static int FORMAT(encode)(uint16_t *scales, uint8_t *codes, float *left, const float *src,
                          float pre, const float *residual, size_t n, int far)
{
    const int stream = block_streams(left, far);
    const size_t whole = n - n % BLOCK;
    const size_t rest = n - whole;
    int poisoned = 0;
    for (size_t i = 0; i < whole; i += BLOCK, codes += BYTES) {
        const float s = FORMAT(encode_block)(codes, left ? left + i : NULL, src + i, vec_set(pre),
                                             residual ? residual + i : NULL, BLOCK, stream);
        *scales++ = block_scale_store(s);
        poisoned |= s != s;
    }
    if (rest) {
        float c[BLOCK_MAX], out[BLOCK];
        uint8_t code[BYTES];
        block_take_short(c, src + whole, pre, residual ? residual + whole : NULL, rest);
        const float s = FORMAT(encode_block)(code, out, c, vec_set(1.0f), NULL, rest, 0);
        *scales = block_scale_store(s);
        poisoned |= s != s;
        memcpy(codes, code, BYTES == BLOCK ? rest : BYTES);
        if (left)
            memcpy(left + whole, out, rest * sizeof *out);
    }
    if (stream)
        vec_stream_end();
    return poisoned;
}

static int FORMAT(decode)(float *dst, const uint16_t *scales, const uint8_t *codes, size_t n,
                          int far)
{
    const int stream = block_streams(dst, far);
    const size_t whole = n - n % BLOCK;
    const size_t rest = n - whole;
    int poisoned = 0;
    for (size_t i = 0; i < whole; i += BLOCK, codes += BYTES)
        poisoned |= FORMAT(decode_block)(dst + i, block_scale_load(*scales++), codes, stream);
    if (rest) {
        float out[BLOCK];
        uint8_t code[BYTES] = {0};
        memcpy(code, codes, BYTES == BLOCK ? rest : BYTES);
        poisoned |= FORMAT(decode_block)(out, block_scale_load(*scales), code, 0);
        memcpy(dst + whole, out, rest * sizeof *out);
    }
    if (stream)
        vec_stream_end();
    return poisoned;
}

static int FORMAT(add)(float *acc, const uint16_t *scales, const uint8_t *codes, size_t n)
{
    const size_t whole = n - n % BLOCK;
    const size_t rest = n - whole;
    int poisoned = 0;
    for (size_t i = 0; i < whole; i += BLOCK, codes += BYTES)
        poisoned |= FORMAT(add_block)(acc + i, block_scale_load(*scales++), codes);
    if (rest) {
        float sum[BLOCK] = {0};
        uint8_t code[BYTES] = {0};
        memcpy(sum, acc + whole, rest * sizeof *sum);
        memcpy(code, codes, BYTES == BLOCK ? rest : BYTES);
        poisoned |= FORMAT(add_block)(sum, block_scale_load(*scales), code);
        memcpy(acc + whole, sum, rest * sizeof *sum);
    }
    return poisoned;
}

#undef FORMAT
#undef BLOCK
#undef BYTES
