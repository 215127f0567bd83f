//! Implements the generation id: 16 random bytes, fixed from the creation or restore of a VM to its end. A guest whose memory
//! came from a snapshot finds another id than the one it knows (docs/contributor/devices/genid.md). The vCPUs' threads call it.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::{BusDevice, Error};

/// The length of an id in bytes.
const BYTES: usize = 16;

/// The id of this VM. The guest reads it; an interrupt after a restore notifies the guest of the change.
pub(super) struct GenerationId([u8; BYTES]);

impl GenerationId {
    /// Generates a random id.
    pub fn new() -> Result<GenerationId, Error> {
        let mut id = [0; BYTES];
        nacelle_base::random::fill(&mut id).map_err(|source| Error::Create { what: "a generation id", source })?;
        Ok(GenerationId(id))
    }
}

impl BusDevice for GenerationId {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let there = self.0.iter().skip(usize::try_from(offset).unwrap_or(usize::MAX));
        data.iter_mut().zip(there).for_each(|(to, byte)| *to = *byte);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_readable_in_any_width_and_read_only() {
        let device = GenerationId::new().unwrap();
        let mut whole = [0; 24];
        for (at, byte) in whole.iter_mut().enumerate() {
            device.read(at as u64, std::slice::from_mut(byte));
        }
        assert_eq!((&whole[..16], &whole[16..]), (&device.0[..], &[0; 8][..]));
        let mut bytes_read = [0xff; 8];
        device.read(12, &mut bytes_read);
        assert_eq!((&bytes_read[..4], &bytes_read[4..]), (&device.0[12..], &[0; 4][..]));
        device.read(u64::MAX, &mut bytes_read);
        assert_eq!(bytes_read, [0; 8]);
        device.write(0, &[!device.0[0]; 8]);
        assert_eq!(device.0[..], whole[..16]);
        assert_ne!(device.0, GenerationId::new().unwrap().0);
    }
}
