// Writes the table from which regression.cpp learns: the loss of pressure in straight pipes, by the formula of Darcy
// and Weisbach with the friction factor of Haaland (1983), with a measurement error of 5%. The data are generated, so
// they have no licence; a table of real measurements has the same form.
//
//   regression_table 20000 > pipes.csv
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

/// xorshift64* (Vigna 2016): the same numbers on every machine.
double uniform() {
  static std::uint64_t state = 2016;
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return static_cast<double>((state * 0x2545F4914F6CDD1DULL) >> 11) / 9007199254740992.0;
}
double between(double low, double high) { return low + (high - low) * uniform(); }

int main(int argc, char** argv) {
  // Roughness in metres: plastic, steel, cast iron, concrete.
  const double roughness[] = {1.5e-6, 4.5e-5, 2.6e-4, 2e-3};
  std::puts("diameter_m,length_m,velocity_m_s,density_kg_m3,viscosity_pa_s,material,log10_pressure_loss_pa");
  const long rows = argc > 1 ? std::atol(argv[1]) : 20000;
  for (long row = 0; row < rows; ++row) {
    const double diameter = between(0.02, 0.3), length = between(10, 1000), velocity = between(0.2, 4);
    const double density = between(700, 1300), viscosity = between(0.0003, 0.003);
    const auto material = static_cast<int>(4 * uniform());

    const double reynolds = density * velocity * diameter / viscosity;
    const double root = -1.8 * std::log10(std::pow(roughness[material] / diameter / 3.7, 1.11) + 6.9 / reynolds);
    const double loss = length / diameter * density * velocity * velocity / 2 / (root * root);
    const double measured = loss * between(0.95, 1.05);
    std::printf("%.5g,%.5g,%.5g,%.5g,%.5g,%d,%.5g\n", diameter, length, velocity, density, viscosity, material,
                std::log10(measured));
  }
}
