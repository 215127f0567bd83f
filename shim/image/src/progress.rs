//! Counts how far the installations of images have come, for people who wait for them.

use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A pull or load in progress. The counts are of layers that the store lacks; before their number is known, all of them are 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Installation {
    /// The full reference of a pull, or the path of an archive.
    pub name: String,
    /// The number of layers.
    pub layers: u64,
    /// The number of layers that are complete.
    pub finished_layers: u64,
    /// The size of the layers in bytes, as registry or archive has them, without those of unknown size.
    pub total_bytes: u64,
    /// How many of these bytes have been read, also of earlier attempts that this one continues.
    pub bytes: u64,
}

/// The installations of a store. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Installations(Arc<Mutex<Vec<Weak<Counts>>>>);

/// The counts of one installation, which is in progress as long as a clone exists.
#[derive(Clone, Debug, Default)]
pub struct InstallationCounter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    name: String,
    layers: AtomicU64,
    finished_layers: AtomicU64,
    total_bytes: AtomicU64,
    bytes: AtomicU64,
}

impl Installations {
    /// Adds an installation.
    pub fn begin(&self, name: String) -> InstallationCounter {
        let counter = InstallationCounter(Arc::new(Counts { name, ..Counts::default() }));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|counts| counts.strong_count() > 0);
        all.push(Arc::downgrade(&counter.0));
        counter
    }

    /// Returns the installations in progress, oldest first.
    pub fn list(&self) -> Vec<Installation> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).map(|counts| counts.read()).collect()
    }
}

impl Counts {
    fn read(&self) -> Installation {
        Installation {
            name: self.name.clone(),
            layers: self.layers.load(Ordering::Relaxed),
            finished_layers: self.finished_layers.load(Ordering::Relaxed),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}

impl InstallationCounter {
    /// Adds a layer of `size` bytes that has to be fetched; 0 stands for an unknown size.
    pub fn add_layer(&self, size: u64) -> LayerCounter {
        self.0.layers.fetch_add(1, Ordering::Relaxed);
        self.0.total_bytes.fetch_add(size, Ordering::Relaxed);
        LayerCounter { installation: self.clone(), size, counted: Arc::default() }
    }
}

/// The counts of one layer. The default belongs to no installation.
#[derive(Clone, Debug, Default)]
pub struct LayerCounter {
    installation: InstallationCounter,
    size: u64,
    /// The bytes that are counted now, at most `size`.
    counted: Arc<AtomicU64>,
}

impl LayerCounter {
    /// Returns a reader that counts what is read of the layer, from 0 on: an earlier attempt no longer counts.
    pub fn reader<R: Read>(&self, layer: R) -> CountingReader<R> {
        self.set(0);
        CountingReader { layer, counter: self.clone(), read: 0 }
    }

    /// Counts the layer as complete.
    pub fn finish(&self) {
        self.set(self.size);
        self.installation.0.finished_layers.fetch_add(1, Ordering::Relaxed);
    }

    fn set(&self, bytes: u64) {
        let bytes = bytes.min(self.size);
        let before = self.counted.swap(bytes, Ordering::Relaxed);
        // Wraps for a smaller value; the sum does not.
        self.installation.0.bytes.fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
    }
}

/// A reader that counts what it has read.
pub struct CountingReader<R> {
    layer: R,
    counter: LayerCounter,
    read: u64,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.layer.read(buffer)?;
        self.read += length as u64;
        self.counter.set(self.read);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_counted_once_however_often_they_are_read() {
        let installations = Installations::default();
        let counter = installations.begin("a.example/b:1".to_owned());
        let only = || installations.list().pop().unwrap();
        assert_eq!(only(), Installation { name: "a.example/b:1".to_owned(), ..Installation::default() });
        let (first, second) = (counter.add_layer(10), counter.add_layer(5));
        for _ in 0..2 {
            io::copy(&mut first.reader([0; 7].as_slice()), &mut io::sink()).unwrap();
        }
        assert_eq!((only().total_bytes, only().bytes, only().finished_layers), (15, 7, 0));
        // More than the manifest says is not counted.
        io::copy(&mut second.reader([0; 9].as_slice()), &mut io::sink()).unwrap();
        assert_eq!(only().bytes, 12);
        first.finish();
        second.finish();
        assert_eq!((only().bytes, only().layers, only().finished_layers), (15, 2, 2));
        LayerCounter::default().finish();
        assert_eq!(installations.list().len(), 1);
        drop((counter, first, second));
        assert_eq!(installations.list(), []);
    }
}
