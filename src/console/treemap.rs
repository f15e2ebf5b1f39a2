//! A squarified treemap (Bruls, Huizing, van Wijk 2000): areas in proportion to sizes, close to squares. Pure.

/// A rectangle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Area {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

/// Returns an area within `whole` for each size. Sizes are above 0 and in descending order.
pub(super) fn layout(sizes: &[f64], whole: Area) -> Vec<Area> {
    let total: f64 = sizes.iter().sum();
    let scale = whole.width * whole.height / total;
    let mut left = whole;
    let mut areas = Vec::with_capacity(sizes.len());
    let mut rest = sizes;
    while let Some(first) = rest.first() {
        let side = left.width.min(left.height);
        let (mut count, mut sum) = (1, first * scale);
        while let Some(next) = rest.get(count) {
            let with = sum + next * scale;
            let smallest_now = rest[count - 1] * scale;
            if worst(first * scale, next * scale, with, side) > worst(first * scale, smallest_now, sum, side) {
                break;
            }
            (count, sum) = (count + 1, with);
        }
        left = row(&rest[..count], scale, sum, left, &mut areas);
        rest = &rest[count..];
    }
    areas
}

/// Returns the worst ratio of the sides in a row with this sum, from its largest and its smallest area.
fn worst(largest: f64, smallest: f64, sum: f64, side: f64) -> f64 {
    let square = side * side;
    (square * largest / (sum * sum)).max(sum * sum / (square * smallest))
}

/// Lays out a row along the shorter side. Returns the rest of the rectangle.
fn row(sizes: &[f64], scale: f64, sum: f64, left: Area, areas: &mut Vec<Area>) -> Area {
    let is_column = left.width >= left.height;
    let thickness = if is_column { sum / left.height } else { sum / left.width };
    let mut at = if is_column { left.y } else { left.x };
    for size in sizes {
        let length = size * scale / thickness;
        areas.push(if is_column {
            Area { x: left.x, y: at, width: thickness, height: length }
        } else {
            Area { x: at, y: left.y, width: length, height: thickness }
        });
        at += length;
    }
    if is_column {
        Area { x: left.x + thickness, width: (left.width - thickness).max(0.0), ..left }
    } else {
        Area { y: left.y + thickness, height: (left.height - thickness).max(0.0), ..left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Area = Area { x: 0.0, y: 0.0, width: 6.0, height: 4.0 };

    #[test]
    fn example_of_the_paper() {
        let areas = layout(&[6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], WHOLE);
        let first =
            [Area { x: 0.0, y: 0.0, width: 3.0, height: 2.0 }, Area { x: 0.0, y: 2.0, width: 3.0, height: 2.0 }];
        assert_eq!(areas[..2], first);
        assert!((areas[2].width - 12.0 / 7.0).abs() < 1e-9 && (areas[2].height - 7.0 / 3.0).abs() < 1e-9, "{areas:?}");
    }

    #[test]
    fn areas_are_proportional_and_inside() {
        for sizes in [&[][..], &[1.0], &[1e12, 1.0, 1.0], &[5.0; 100]] {
            let areas = layout(sizes, WHOLE);
            let scale = 24.0 / sizes.iter().sum::<f64>();
            assert_eq!(areas.len(), sizes.len());
            for (area, size) in areas.iter().zip(sizes) {
                assert!((area.width * area.height - size * scale).abs() < 1e-6, "{area:?}");
                assert!(area.x >= 0.0 && area.x + area.width < 6.0 + 1e-6, "{area:?}");
                assert!(area.y >= 0.0 && area.y + area.height < 4.0 + 1e-6, "{area:?}");
            }
        }
    }
}
