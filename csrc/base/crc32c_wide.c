/* crc32c_wide.c - see crc32c_wide.h. Empty but on x86-64.
 *
 * Long data is taken as crc32c.c does it: vectors are folded beside three registers of the CRC
 * instruction, which have a unit of their own. Meanwhile the next bytes of the data are prefetched:
 * from memory that is twice as fast as leaving four streams to the CPU's own prefetchers.
 *
 *     crc -> [ folded, 4 vectors at a time ][ block, a ][ block, b ][ block, c ] -> crc ...
 *
 * Short data, and what is left of long, has 8 vectors at a time folded: a fold must wait for its
 * products, and these come out of the unit one after the other. Then they are folded into the last
 * of them, and so are the vectors left in the data. Only the last 64 bytes, and what is less than a
 * vector, go through the CRC instruction:
 *
 *     crc -> [ 8 vectors ][ 8 vectors ] ... [ vector ][ vector ] ... [ words ][ bytes ]
 */
#ifdef __x86_64__

#include "crc32c_wide.h"

#include <immintrin.h>
#include <string.h>

#define WIDE __attribute__((target("avx512f,pclmul,sse4.2,vpclmulqdq")))

enum { VECTOR = 64, STRIDE_VECTORS = 8, STRIDE = STRIDE_VECTORS * VECTOR };

/* Per turn: 256 bytes folded beside 40 for each register, which keep both units equally long. */
enum {
    TURNS = 32,
    TURN_VECTORS = 4,
    TURN_WORDS = 5,
    TURN_FOLDED = TURN_VECTORS * VECTOR,
    TURN_ALL = TURN_FOLDED + 3 * TURN_WORDS * 8,
    FOLDED = TURNS * TURN_FOLDED,
    BLOCK = TURNS * TURN_WORDS * 8,
    LONG = TURNS * TURN_ALL,
};

/* Factors of a fold: for the first 8 bytes of 16, and for the others. */
typedef struct factors {
    uint64_t first, second;
} factors;

static factors by_vector, by_stride, by_turn;
static uint64_t by_blocks[3]; /* factors over one, two, three blocks */

int crc32c_wide_supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") &&
           __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}

/* Makes the factors that fold over so many bytes. In a 64-bit word bit 63 is the coefficient of
 * x^0; the product of two words, in two words, lies one bit lower than its coefficients would, and
 * so counts x times as much. */
static factors factors_over(size_t bytes, uint32_t (*power)(size_t n))
{
    return (factors){(uint64_t)power(8 * bytes + 64 - 1) << 32, (uint64_t)power(8 * bytes - 1)
                                                                    << 32};
}

/* Makes all factors. Those over blocks allow for two things: the product of two registers is a word
 * that counts x times as much, and the CRC instruction multiplies it by x^32. */
void crc32c_wide_prepare(uint32_t (*power)(size_t n))
{
    by_vector = factors_over(VECTOR, power);
    by_stride = factors_over(STRIDE, power);
    by_turn = factors_over(TURN_FOLDED, power);
    for (size_t blocks = 1; blocks <= 3; blocks++)
        by_blocks[blocks - 1] = power(8 * BLOCK * blocks - 32 - 1);
}

/* ---- words ---- */

static inline uint64_t word_at(const unsigned char *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

WIDE static uint32_t by_words(uint32_t start, const unsigned char *data, size_t n)
{
    uint64_t crc = start;
    for (; n >= 8; data += 8, n -= 8)
        crc = _mm_crc32_u64(crc, word_at(data));
    for (; n; data++, n--)
        crc = _mm_crc32_u8((uint32_t)crc, *data);
    return (uint32_t)crc;
}

WIDE static inline __m128i product(uint64_t crc, uint64_t factor)
{
    return _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                _mm_cvtsi64_si128((long long)factor), 0);
}

/* Joins registers, each moved on by the blocks after it: first by three, a by two, b by one. */
WIDE static inline uint32_t append_blocks(uint64_t first, uint64_t a, uint64_t b, uint64_t c)
{
    const __m128i last = _mm_xor_si128(product(a, by_blocks[1]), product(b, by_blocks[0]));
    const __m128i sum = _mm_xor_si128(product(first, by_blocks[2]), last);
    return (uint32_t)(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum)) ^ c);
}

/* ---- vectors ---- */

WIDE static inline __m512i load(const unsigned char *data)
{
    return _mm512_loadu_si512(data);
}

WIDE static inline __m512i everywhere(const factors *f)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)f->second, (long long)f->first));
}

WIDE static inline __m512i fold_vector(__m512i x, __m512i by, __m512i next)
{
    const __m512i first = _mm512_clmulepi64_epi128(x, by, 0x00);
    const __m512i second = _mm512_clmulepi64_epi128(x, by, 0x11);
    return _mm512_ternarylogic_epi64(first, second, next, 0x96); /* the sum of the three */
}

/* Loads the first vector of the data, with the register of the bytes before it added. */
WIDE static inline __m512i load_first(uint32_t crc, const unsigned char *data)
{
    return _mm512_xor_si512(
        load(data), _mm512_inserti32x4(_mm512_setzero_si512(), _mm_cvtsi32_si128((int)crc), 0));
}

/* Returns the register that a vector of data leaves. */
WIDE static uint32_t remainder_of(__m512i x)
{
    unsigned char bytes[VECTOR];
    _mm512_storeu_si512(bytes, x);
    return by_words(0, bytes, VECTOR);
}

/* ---- long data ---- */

WIDE static uint32_t folded_beside_words(uint32_t crc, const unsigned char *data, int more)
{
    const __m512i by = everywhere(&by_turn), by_one = everywhere(&by_vector);
    const unsigned char *block = data + FOLDED, *next = more ? data + LONG : data;
    uint64_t a = 0, b = 0, c = 0;
    __m512i x[TURN_VECTORS];
    x[0] = load_first(crc, data);
#pragma GCC unroll 4 /* or the vectors would live in memory */
    for (int k = 1; k < TURN_VECTORS; k++)
        x[k] = load(data + VECTOR * k);
    for (int turn = 0; turn < TURNS; turn++, next += TURN_ALL) {
        data += TURN_FOLDED;
        if (turn < TURNS - 1) {
#pragma GCC unroll 4
            for (int k = 0; k < TURN_VECTORS; k++)
                x[k] = fold_vector(x[k], by, load(data + VECTOR * k));
        }
#pragma GCC unroll 5
        for (int w = 0; w < TURN_WORDS; w++, block += 8) {
            a = _mm_crc32_u64(a, word_at(block));
            b = _mm_crc32_u64(b, word_at(block + BLOCK));
            c = _mm_crc32_u64(c, word_at(block + 2 * BLOCK));
        }
#pragma GCC unroll 6
        for (int line = 0; line < TURN_ALL; line += VECTOR)
            __builtin_prefetch(next + line);
    }
#pragma GCC unroll 4
    for (int k = 1; k < TURN_VECTORS; k++)
        x[k] = fold_vector(x[k - 1], by_one, x[k]);
    return append_blocks(remainder_of(x[TURN_VECTORS - 1]), a, b, c);
}

/* ---- short data ---- */

/* Folds all strides of the data, at least one, into one vector that stands at the end of the last.
 */
WIDE static inline __m512i fold_strides(uint32_t crc, const unsigned char *data, size_t strides)
{
    const __m512i by = everywhere(&by_stride), by_one = everywhere(&by_vector);
    __m512i x[STRIDE_VECTORS];
    x[0] = load_first(crc, data);
#pragma GCC unroll 8
    for (int k = 1; k < STRIDE_VECTORS; k++)
        x[k] = load(data + VECTOR * k);
    while (--strides > 0) {
        data += STRIDE;
#pragma GCC unroll 8
        for (int k = 0; k < STRIDE_VECTORS; k++)
            x[k] = fold_vector(x[k], by, load(data + VECTOR * k));
    }
#pragma GCC unroll 8
    for (int k = 1; k < STRIDE_VECTORS; k++)
        x[k] = fold_vector(x[k - 1], by_one, x[k]);
    return x[STRIDE_VECTORS - 1];
}

WIDE static uint32_t folded(uint32_t crc, const unsigned char *data, size_t n)
{
    if (n < 2 * VECTOR)
        return by_words(crc, data, n);
    const __m512i by = everywhere(&by_vector);
    const size_t strides = n / STRIDE;
    __m512i x = strides > 0 ? fold_strides(crc, data, strides) : load_first(crc, data);
    size_t done = strides > 0 ? strides * STRIDE : VECTOR;
    for (; n - done >= VECTOR; done += VECTOR)
        x = fold_vector(x, by, load(data + done));
    return by_words(remainder_of(x), data + done, n - done);
}

WIDE uint32_t crc32c_wide(uint32_t crc, const unsigned char *data, size_t n)
{
    for (; n >= LONG; data += LONG, n -= LONG)
        crc = folded_beside_words(crc, data, n >= 2 * LONG + VECTOR);
    return folded(crc, data, n);
}

#endif
