/* crc32c.c - CRC-32C by the CPU's instructions (SSE4.2, VPCLMULQDQ, ARMv8) or by tables.
 *
 * Problem. Every payload byte is checked at both ends, so the checksum has to run at memory speed.
 * A CRC instruction takes 8 bytes but must wait, some three cycles, for the one before it.
 *
 * Design. Three adjacent blocks run through three registers at once, which fills the waiting time,
 * and are then joined:
 *
 *     crc -> [ block, register a ]   0 -> [ block, register b ]   0 -> [ block, register c ]
 *     joined = append(append(a) ^ b) ^ c        append(r): r followed by a block of zero bytes
 *
 * append is linear, so it takes four table look-ups. Blocks come in two lengths: long ones make the
 * joints rare, short ones leave little for one register alone. Without the instructions, eight
 * bytes at a time go through eight tables.
 *
 * That keeps the unit of the CRC instruction busy, and only that one. Where carry-less products of
 * vectors (VPCLMULQDQ) are at hand, whose unit is another, a fourth and longer block is folded by
 * them at the same time: 35 against 24 GB/s on a Zen 3 core (256 KiB, in its cache; `pytest bench/
 * -k crc32c` prints both). With registers of 64 bytes there is more to it (crc32c_wide.c).
 *
 *     crc -> [ folded, vectors x ][ block, register a ][ block, register b ][ block, register c ]
 *
 * Folding keeps 16 bytes that are congruent to all bytes so far. FOLD_STRIDE bytes further on they
 * count x^(8 FOLD_STRIDE) times as much; both halves are multiplied by that power modulo P, which
 * leaves less than 16 bytes again (Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel, 2009).
 *
 * A register is a polynomial over GF(2) modulo P with its bits reversed: bit 31 is the coefficient
 * of x^0. One more byte is a multiplication by x^8, so every table here lists multiples of a power
 * of x. All are made once, on first use, and never change after that.
 */
#include "crc32c.h"

#include <pthread.h>
#include <string.h>

#include "crc32c_wide.h"

#if defined __x86_64__
#include <immintrin.h>
#elif defined __aarch64__ && defined __linux__
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define POLYNOMIAL 0x82f63b78u /* P less x^32 */

enum { LONG_BLOCK = 4096, SHORT_BLOCK = 256, SLICES = 8, LINE = 64 };

/* Per turn: 128 bytes folded beside 40 for each register, which keep both units equally long. */
enum {
    FOLD_VECTORS = 4,
    FOLD_STRIDE = 32 * FOLD_VECTORS,
    FOLD_WORDS = 5,
    FOLD_TURNS = 64,
    FOLD_TURN = FOLD_STRIDE + 3 * 8 * FOLD_WORDS,
    FOLD_PART = FOLD_TURNS * FOLD_STRIDE,
    FOLD_BLOCK = FOLD_TURNS * FOLD_WORDS * 8,
    FOLD_ALL = FOLD_PART + 3 * FOLD_BLOCK,
};

/* row[k][b] is byte b at position k of a register or word, times the table's power of x. */
typedef struct append_table {
    uint32_t row[4][256];
} append_table;

static uint32_t slice[SLICES][256];
static append_table append_long;
static append_table append_short;

typedef uint32_t method(uint32_t crc, const unsigned char *data, size_t n);
static method *methods[4]; /* by rising speed */
static int method_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---- making the tables ---- */

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = (b >> 1) ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

/* Returns x^n as a register. */
static uint32_t power(size_t n)
{
    uint32_t result = 1u << 31;
    for (uint32_t square = 1u << 30; n; n >>= 1, square = multiply(square, square))
        if (n & 1)
            result = multiply(result, square);
    return result;
}

static void make_append(append_table *table, size_t block)
{
    const uint32_t factor = power(8 * block);
    for (int k = 0; k < 4; k++)
        for (uint32_t b = 0; b < 256; b++)
            table->row[k][b] = multiply(b << 8 * k, factor);
}

static void make_slices(void)
{
    for (size_t k = 0; k < SLICES; k++)
        for (uint32_t b = 0; b < 256; b++)
            slice[k][b] = multiply(b, power(8 * (SLICES - k)));
}

/* ---- by tables ---- */

static uint64_t load_word(const unsigned char *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static uint32_t by_tables(uint32_t crc, const unsigned char *data, size_t n)
{
    for (; n >= 8; data += 8, n -= 8) {
        const uint64_t word = load_word(data) ^ crc;
        crc = 0;
        for (int k = 0; k < SLICES; k++)
            crc ^= slice[k][word >> 8 * k & 0xff];
    }
    for (; n; data++, n--)
        crc = crc >> 8 ^ slice[SLICES - 1][(crc ^ *data) & 0xff];
    return crc;
}

/* ---- by instructions ---- */

#if defined __x86_64__

#define HARDWARE __attribute__((target("sse4.2")))
#define NEXT_WORD(crc, word) _mm_crc32_u64(crc, word)
#define NEXT_BYTE(crc, byte) _mm_crc32_u8((uint32_t)(crc), byte)
/* A register, as wide as the instruction's result so that nothing is narrowed inside the loop. */
typedef uint64_t crc_register;

static int hardware_supported(void)
{
    return __builtin_cpu_supports("sse4.2") != 0;
}

#elif defined __aarch64__ && defined __linux__

#define HARDWARE __attribute__((target("+crc")))
#define NEXT_WORD(crc, word) __crc32cd(crc, word)
#define NEXT_BYTE(crc, byte) __crc32cb(crc, byte)
typedef uint32_t crc_register;

static int hardware_supported(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

#endif

#ifdef HARDWARE

static crc_register append(const append_table *table, crc_register crc)
{
    return table->row[0][crc & 0xff] ^ table->row[1][crc >> 8 & 0xff] ^
           table->row[2][crc >> 16 & 0xff] ^ table->row[3][crc >> 24 & 0xff];
}

HARDWARE static crc_register three_blocks(crc_register a, const unsigned char *data, size_t block,
                                          const append_table *table)
{
    crc_register b = 0;
    crc_register c = 0;
    for (size_t i = 0; i < block; i += 8) {
        a = NEXT_WORD(a, load_word(data + i));
        b = NEXT_WORD(b, load_word(data + block + i));
        c = NEXT_WORD(c, load_word(data + 2 * block + i));
    }
    return append(table, append(table, a) ^ b) ^ c;
}

HARDWARE static uint32_t by_instructions(uint32_t start, const unsigned char *data, size_t n)
{
    crc_register crc = start;
    for (; n >= 3 * LONG_BLOCK; data += 3 * LONG_BLOCK, n -= 3 * LONG_BLOCK)
        crc = three_blocks(crc, data, LONG_BLOCK, &append_long);
    for (; n >= 3 * SHORT_BLOCK; data += 3 * SHORT_BLOCK, n -= 3 * SHORT_BLOCK)
        crc = three_blocks(crc, data, SHORT_BLOCK, &append_short);
    for (; n >= 8; data += 8, n -= 8)
        crc = NEXT_WORD(crc, load_word(data));
    for (; n; data++, n--)
        crc = NEXT_BYTE(crc, *data);
    return (uint32_t)crc;
}

#endif

/* ---- by instructions and products of vectors ---- */

#if defined __x86_64__
#define FOLDING __attribute__((target("avx2,pclmul,sse4.2,vpclmulqdq")))

static append_table append_fold;
static uint64_t fold_factor[2]; /* for the first 8 bytes of 16, for the others */

/* Makes the factors that fold 16 bytes FOLD_STRIDE bytes on. In a 64-bit word bit 63 is the
 * coefficient of x^0; the product of two words, in two words, lies one bit lower than its
 * coefficients would, and so counts x times as much. */
static void make_fold_factors(void)
{
    fold_factor[0] = (uint64_t)power(8 * FOLD_STRIDE + 64 - 1) << 32;
    fold_factor[1] = (uint64_t)power(8 * FOLD_STRIDE - 1) << 32;
}

FOLDING static __m256i load_vector(const unsigned char *data)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)data);
}

FOLDING static __m256i fold(__m256i x, __m256i factors, __m256i next)
{
    const __m256i first = _mm256_clmulepi64_epi128(x, factors, 0x00);
    const __m256i second = _mm256_clmulepi64_epi128(x, factors, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(first, second), next);
}

FOLDING static crc_register folded_and_three_blocks(crc_register crc, const unsigned char *data,
                                                    int more)
{
    const __m256i factors = _mm256_broadcastsi128_si256(
        _mm_set_epi64x((long long)fold_factor[1], (long long)fold_factor[0]));
    const unsigned char *block = data + FOLD_PART;
    const unsigned char *next = more ? data + FOLD_ALL : data;
    crc_register a = 0;
    crc_register b = 0;
    crc_register c = 0;
    __m256i x[FOLD_VECTORS];
    for (int k = 0; k < FOLD_VECTORS; k++)
        x[k] = load_vector(data + 32 * k);
    x[0] = _mm256_xor_si256(x[0], _mm256_set_epi64x(0, 0, 0, (long long)crc));
    for (int turn = 0; turn < FOLD_TURNS; turn++, next += FOLD_TURN) {
        data += FOLD_STRIDE;
        if (turn < FOLD_TURNS - 1) {
#pragma GCC unroll 4 /* or the vectors would live in memory */
            for (int k = 0; k < FOLD_VECTORS; k++)
                x[k] = fold(x[k], factors, load_vector(data + 32 * k));
        }
#pragma GCC unroll 5
        for (int w = 0; w < FOLD_WORDS; w++, block += 8) {
            a = NEXT_WORD(a, load_word(block));
            b = NEXT_WORD(b, load_word(block + FOLD_BLOCK));
            c = NEXT_WORD(c, load_word(block + 2 * FOLD_BLOCK));
        }
#pragma GCC unroll 4
        for (int line = 0; line < FOLD_TURN; line += LINE)
            __builtin_prefetch(next + line);
    }
    uint64_t left[FOLD_STRIDE / 8];
    memcpy(left, x, sizeof left);
    crc_register whole = 0;
    for (int w = 0; w < FOLD_STRIDE / 8; w++)
        whole = NEXT_WORD(whole, left[w]);
    whole = append(&append_fold, whole) ^ a;
    return append(&append_fold, append(&append_fold, whole) ^ b) ^ c;
}

FOLDING static uint32_t by_folding(uint32_t crc, const unsigned char *data, size_t n)
{
    for (; n >= FOLD_ALL; data += FOLD_ALL, n -= FOLD_ALL)
        crc = (uint32_t)folded_and_three_blocks(crc, data, n >= 2 * FOLD_ALL + LINE);
    return by_instructions(crc, data, n);
}

#endif

/* ---- the choice ---- */

static void prepare_methods(void)
{
    make_slices();
    methods[method_count++] = by_tables;
#ifdef HARDWARE
    make_append(&append_long, LONG_BLOCK);
    make_append(&append_short, SHORT_BLOCK);
    if (hardware_supported())
        methods[method_count++] = by_instructions;
#endif
#ifdef FOLDING
    make_append(&append_fold, FOLD_BLOCK);
    make_fold_factors();
    if (hardware_supported() && __builtin_cpu_supports("avx2") &&
        __builtin_cpu_supports("vpclmulqdq"))
        methods[method_count++] = by_folding;
    crc32c_wide_prepare(power);
    if (crc32c_wide_supported())
        methods[method_count++] = crc32c_wide;
#endif
}

uint32_t crc32c(uint32_t crc, const void *data, size_t n)
{
    pthread_once(&once, prepare_methods);
    return ~methods[method_count - 1](~crc, data, n);
}

int crc32c_methods(void)
{
    pthread_once(&once, prepare_methods);
    return method_count;
}

uint32_t crc32c_by(int method, uint32_t crc, const void *data, size_t n)
{
    pthread_once(&once, prepare_methods);
    return ~methods[method](~crc, data, n);
}
