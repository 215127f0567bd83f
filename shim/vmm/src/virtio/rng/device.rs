//! Owns: the entropy device as a transport sees it.

/// The entropy device. Box it and hand it to a transport.
#[derive(Debug, Default)]
pub struct Rng {}

impl Rng {
    /// A device whose queue does not run yet.
    pub fn new() -> Rng {
        Rng::default()
    }

    /// The device for a transport.
    pub fn device(self) -> Box<dyn crate::Device> {
        unimplemented!()
    }
}
