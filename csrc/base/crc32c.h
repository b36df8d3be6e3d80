/* crc32c.h - the checksum of every frame: CRC-32C (Castagnoli), as in iSCSI and ext4. */
#ifndef RINGCOMM_CRC32C_H
#define RINGCOMM_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of n more bytes, where crc is that of the bytes before them, 0 at first:
 * crc32c(0, "123456789", 9) == 0xe3069283. Uses the CPU's instructions where it has them. */
uint32_t crc32c(uint32_t crc, const void *data, size_t n);

/* For tests and benches: how many methods this CPU has, and the same by one of them, where 0 is by
 * tables alone and the last one is crc32c's. */
int crc32c_methods(void);
uint32_t crc32c_by(int method, uint32_t crc, const void *data, size_t n);

#endif
