//! Returns random bytes of the kernel by the system call itself: libraries that look up getrandom(3) at run time do not
//! find it in a static program (nacelle-pod), and a jailed process has no /dev/random.

use crate::retry::retry_interrupted;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;

/// Fills `bytes` with random bytes. The call does not block once the node has booted.
pub fn fill(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let filled = retry_interrupted(|| getrandom(&mut *bytes, GetRandomFlags::empty()))?;
        bytes = bytes.get_mut(filled..).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_filled() {
        let (mut one, mut two) = (vec![0; 5000], vec![0; 5000]);
        fill(&mut one).unwrap();
        fill(&mut two).unwrap();
        for (one, two) in one.chunks_exact(20).zip(two.chunks_exact(20)) {
            assert_ne!(one, two);
        }
        fill(&mut []).unwrap();
    }
}
