//! The check of an image before the driver gets it: what it accepts keeps its own lengths inside.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mpsshim_server::engine::is_whole;

const FATBIN: [u8; 4] = 0xBA55_ED50u32.to_le_bytes();

fuzz_target!(|image: &[u8]| {
    if !is_whole(image) {
        return;
    }
    if image.starts_with(&FATBIN) {
        let header = u64::from(u16::from_le_bytes([image[6], image[7]]));
        let mut payload = [0; 8];
        payload.copy_from_slice(&image[8..16]);
        assert!(header + u64::from_le_bytes(payload) <= image.len() as u64);
    } else if image.starts_with(b"\x7fELF") {
        assert!(image.len() >= 0x40, "an ELF header");
    } else {
        assert!(image[0].is_ascii(), "text");
    }
});
