/* crc32c.h - the checksum of every frame: CRC-32C (Castagnoli), as in iSCSI and ext4. */
#ifndef RINGCOMM_CRC32C_H
#define RINGCOMM_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of n more bytes, where crc is that of the bytes before them, 0 at first:
 * crc32c(0, "123456789", 9) == 0xe3069283. Uses the CPU's instructions where it has them. */
uint32_t crc32c(uint32_t crc, const void *data, size_t n);

/* The same by tables alone. */
uint32_t crc32c_portable(uint32_t crc, const void *data, size_t n);

#endif
