/* test_crc32c.c - the checksum against published values and a bit-by-bit reference. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/base/crc32c.h"
#include "check.h"

/* Bytes that the methods by vectors take at a time, of long data and of short; lengths from 0. */
enum {
    FOLDED = 64 * 128 + 3 * 64 * 40,
    WIDE = 32 * 256 + 3 * 32 * 40,
    STRIDE = 512,
    SHORT = 3 * STRIDE,
    SIZE = 3 * FOLDED + 3 * 256 + 100
};

static unsigned char bytes[SIZE];

static void fill(void)
{
    uint64_t state = 12345;
    for (size_t i = 0; i < SIZE; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (unsigned char)(state >> 56);
    }
}

/* The definition: a shift register, one bit at a time. */
static uint32_t reference(uint32_t crc, const unsigned char *data, size_t n)
{
    crc = ~crc;
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            const uint32_t out = (crc ^ (uint32_t)(data[i] >> bit)) & 1;
            crc = (crc >> 1) ^ (out ? 0x82f63b78u : 0);
        }
    return ~crc;
}

static void expect_after(uint32_t crc, const void *data, size_t n, uint32_t want)
{
    CHECK_EQ(crc32c(crc, data, n), want);
    for (int method = 0; method < crc32c_methods(); method++)
        CHECK_EQ(crc32c_by(method, crc, data, n), want);
}

static void expect(const void *data, size_t n, uint32_t want)
{
    expect_after(0, data, n, want);
    CHECK_EQ(reference(0, data, n), want);
}

/* RFC 3720, appendix B.4, and the check value of the CRC catalogues. */
static void published_values(void)
{
    unsigned char block[32];
    expect("", 0, 0);
    expect("123456789", 9, 0xe3069283u);
    memset(block, 0, sizeof block);
    expect(block, sizeof block, 0x8a9136aau);
    memset(block, 0xff, sizeof block);
    expect(block, sizeof block, 0x62a8ab43u);
    for (int i = 0; i < 32; i++)
        block[i] = (unsigned char)i;
    expect(block, sizeof block, 0x46dd794eu);
    for (int i = 0; i < 32; i++)
        block[i] = (unsigned char)(31 - i);
    expect(block, sizeof block, 0x113fdb5cu);
}

/* The checksums of all lengths from one place on cost the reference no more than the longest. */
static void expect_lengths(const unsigned char *data, size_t most, size_t step)
{
    uint32_t want = 0;
    for (size_t n = 0; n <= most; n += step) {
        expect_after(0, data, n, want);
        want = reference(want, data + n, step);
    }
}

static void every_short_length_at_every_alignment(void)
{
    for (size_t offset = 0; offset < 64; offset++)
        expect_lengths(bytes + offset, offset % 16 ? STRIDE : SHORT, 1);
}

/* Lengths around every change of method: words, blocks, strides, folded parts. */
static void long_lengths(void)
{
    static const size_t around[] = {3 * 4096,        WIDE,       WIDE + STRIDE,  2 * WIDE,
                                    2 * WIDE + 64,   3 * WIDE,   FOLDED,         FOLDED + 3 * 256,
                                    FOLDED + STRIDE, 2 * FOLDED, 2 * FOLDED + 64};
    for (size_t i = 0; i < CHECK_COUNT(around); i++)
        for (size_t n = around[i] - 9; n <= around[i] + 9; n++)
            for (size_t offset = 0; offset < 8; offset += 3)
                expect_after(0, bytes + offset, n, reference(0, bytes + offset, n));
    expect_lengths(bytes + 5, SIZE - 5 - 61, 61);
}

static void continues_at_any_split(void)
{
    const uint32_t whole = reference(0, bytes, SIZE);
    for (size_t split = 0; split <= SIZE; split += 97) {
        const uint32_t head = crc32c(0, bytes, split);
        expect_after(head, bytes + split, SIZE - split, whole);
    }
}

/* A single changed bit changes the checksum, wherever it is. */
static void sees_every_flipped_bit(void)
{
    const size_t n = FOLDED + 3 * 256 + 13;
    const uint32_t whole = crc32c(0, bytes, n);
    for (size_t bit = 0; bit < 8 * n; bit += 7) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK(crc32c(0, bytes, n) != whole);
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    CHECK_EQ(crc32c(0, bytes, n), whole);
}

int main(void)
{
    static const check_test tests[] = {
        {"published_values", published_values},
        {"every_short_length_at_every_alignment", every_short_length_at_every_alignment},
        {"long_lengths", long_lengths},
        {"continues_at_any_split", continues_at_any_split},
        {"sees_every_flipped_bit", sees_every_flipped_bit},
    };
    fill();
    return check_run(tests, CHECK_COUNT(tests));
}
