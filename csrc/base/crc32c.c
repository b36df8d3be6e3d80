/* crc32c.c - CRC-32C by the CPU's instructions (SSE4.2, ARMv8) or by tables.
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
 * A register is a polynomial over GF(2) modulo P with its bits reversed: bit 31 is the coefficient
 * of x^0. One more byte is a multiplication by x^8, so every table here lists multiples of a power
 * of x. All are made once, on first use, and never change after that.
 */
#include "crc32c.h"

#include <pthread.h>
#include <string.h>

#if defined __x86_64__
#include <nmmintrin.h>
#elif defined __aarch64__ && defined __linux__
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define POLYNOMIAL 0x82f63b78u /* P less x^32 */

enum { LONG_BLOCK = 4096, SHORT_BLOCK = 256, SLICES = 8 };

/* row[k][b] is byte b at position k of a register or word, times the table's power of x. */
typedef struct append_table {
    uint32_t row[4][256];
} append_table;

static uint32_t slice[SLICES][256];
static append_table append_long;
static append_table append_short;
static uint32_t (*fastest)(uint32_t crc, const unsigned char *data, size_t n);
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

/* x^(8 n): what n zero bytes multiply a register by. */
static uint32_t power(size_t n)
{
    uint32_t result = 1u << 31;
    for (uint32_t square = 1u << 23; n; n >>= 1, square = multiply(square, square))
        if (n & 1)
            result = multiply(result, square);
    return result;
}

static void make_append(append_table *table, size_t block)
{
    const uint32_t factor = power(block);
    for (int k = 0; k < 4; k++)
        for (uint32_t b = 0; b < 256; b++)
            table->row[k][b] = multiply(b << 8 * k, factor);
}

static void make_slices(void)
{
    for (size_t k = 0; k < SLICES; k++)
        for (uint32_t b = 0; b < 256; b++)
            slice[k][b] = multiply(b, power(SLICES - k));
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
/* As wide as the instruction's result, so that nothing is narrowed inside the loop. */
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

/* ---- the choice ---- */

static void prepare(void)
{
    make_slices();
    fastest = by_tables;
#ifdef HARDWARE
    make_append(&append_long, LONG_BLOCK);
    make_append(&append_short, SHORT_BLOCK);
    if (hardware_supported())
        fastest = by_instructions;
#endif
}

uint32_t crc32c(uint32_t crc, const void *data, size_t n)
{
    pthread_once(&once, prepare);
    return ~fastest(~crc, data, n);
}

uint32_t crc32c_portable(uint32_t crc, const void *data, size_t n)
{
    pthread_once(&once, prepare);
    return ~by_tables(~crc, data, n);
}
