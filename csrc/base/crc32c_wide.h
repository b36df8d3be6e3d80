/* crc32c_wide.h - CRC-32C by carry-less products of 64-byte vectors, a method of crc32c.c's. Its
 * file is apart since it needs other flags where the tests are built (tests/c/Makefile, WIDE).
 */
#ifndef RINGCOMM_CRC32C_WIDE_H
#define RINGCOMM_CRC32C_WIDE_H

#ifdef __x86_64__

#include <stddef.h>
#include <stdint.h>

/* Returns 1 if this CPU has the instructions. */
int crc32c_wide_supported(void);
/* Makes the constants; called before the first crc32c_wide. power(n): x^n as a register (crc32c.c).
 */
void crc32c_wide_prepare(uint32_t (*power)(size_t n));
/* Returns the register after n more bytes. */
uint32_t crc32c_wide(uint32_t crc, const unsigned char *data, size_t n);

#endif
#endif
